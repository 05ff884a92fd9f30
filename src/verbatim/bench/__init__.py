"""`verbatim bench`: measurements of this engine and of other engines (rivals)."""
