"""Other engines, run beside ours by `verbatim bench --against`. Each worker is a script of its own, run by whichever Python has the
rival installed, and speaks JSON lines: one request in, one answer out. `client` is our end of that pipe."""
