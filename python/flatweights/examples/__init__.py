"""Programs to run and to read as models for your own: ``python -m flatweights.examples.NAME``."""
