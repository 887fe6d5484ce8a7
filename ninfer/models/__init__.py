"""Per architecture: configuration, logical parameters and layer schedule."""
