"""Parts of the context cache's policy: identities, catalogue, value, reasons for misses."""
