"""The embedded catalogue: YAML files by theme. Data only."""
