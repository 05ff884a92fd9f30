"""Speculation: guesses at the next tokens, verified by the target in one pass. Guesses change the time, never the text."""
