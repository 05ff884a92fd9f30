"""The engine process, its supervisor in the HTTP process, and the messages between the two."""
