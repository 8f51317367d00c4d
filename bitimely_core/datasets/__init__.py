"""One file a data source: a decorated generator of units and findings. `registry.load_members` imports them all; no torch here."""
