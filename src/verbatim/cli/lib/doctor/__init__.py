"""`verbatim doctor MODEL`: which checks run, and the report of what they find."""
