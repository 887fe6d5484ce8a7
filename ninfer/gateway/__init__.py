"""HTTP: protocols, errors and connection life. Decides nothing about order or memory."""
