"""Other frameworks: each module has what one of them needs of lpq, and imports it when that is used."""
