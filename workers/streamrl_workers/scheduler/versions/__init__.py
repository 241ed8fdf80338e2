"""How versions of the weights get to generators: from whom, and when."""
