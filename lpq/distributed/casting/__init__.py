"""Casts of masters: the words that a rank sends about its fragments, and the encoding from the words of all ranks."""
