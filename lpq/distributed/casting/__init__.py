"""How masters are cast: what one rank says of its fragments, and what it makes of what all have said."""
