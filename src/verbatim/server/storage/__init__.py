"""What the server keeps for its clients: stored answers, files and batches."""
