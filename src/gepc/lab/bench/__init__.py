"""The paper's evaluation: every table and figure from one pass over each data set."""
