"""A trained adapter merged into its base, a unit at a time, and written as a model of its own."""
