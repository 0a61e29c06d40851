"""How masters are cast: the words that one rank sends about its fragments, and what it makes of those of all."""
