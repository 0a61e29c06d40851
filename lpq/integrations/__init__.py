"""Other frameworks: each module serves one framework, and imports it when the module is used."""
