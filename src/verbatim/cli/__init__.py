"""The command line: one file per command. `main` dispatches, `options` builds flags from tables,
`terminal` writes to the streams."""
