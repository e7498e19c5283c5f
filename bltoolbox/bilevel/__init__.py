"""bilevel."""
