"""Methods, theory and experiments of papers. They use the core as a user's own code does, and the core does not know them."""
