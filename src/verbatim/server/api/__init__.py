"""The HTTP protocols, one module per protocol, and the code that they share."""
