"""Moving weights from the trainer to an engine that holds its own, and proving that they arrived."""
