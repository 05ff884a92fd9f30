"""The command line, one file a command. `main` finds the command, `options` makes flags of tables, `screen` writes."""
