"""Which tokens of which sequences are computed next, in which cache blocks. Integers only; imports nothing but base."""
