"""From logits to a token: the order and the meaning of every sampler (pipeline.py is the way in)."""
