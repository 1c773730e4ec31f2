"""One training step of a layer: options, passes, the exchange between them, gradients."""
