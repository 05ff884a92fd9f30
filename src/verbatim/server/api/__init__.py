"""The HTTP protocols, one file each, and what they share."""
