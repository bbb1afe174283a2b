"""The two tables of low-precision training - what the model states cost, what they do to the loss - on real text."""
