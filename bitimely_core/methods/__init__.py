"""Methods without a network: fitted at once on the labels of a view, with arrays for weights."""
