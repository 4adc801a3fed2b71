"""How embedded pairs are made: one recipe, from the functions on a machine to two models, their tokenizer and their card."""
