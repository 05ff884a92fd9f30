"""The HTTP process, the engine process, and the messages between them."""
