"""Other engines for `verbatim bench --against`.

Each worker is a script that runs in a Python with the rival installed, and speaks JSON lines: one
request in, one response out. `client` is our end of that pipe.
"""
