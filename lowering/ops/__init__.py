"""One file per family of operators; an operator and its `*_backward` stand next to each other."""
