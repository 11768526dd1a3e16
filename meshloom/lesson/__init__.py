"""The lesson of ``meshloom quickstart``: problems, a small model, and two runs on them."""
