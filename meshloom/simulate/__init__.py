"""A run on virtual devices: the control loop of a real run, with a virtual clock. Imports without torch."""
