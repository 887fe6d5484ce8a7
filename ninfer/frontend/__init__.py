"""What a prompt is in tokens and what tokens mean in text; no sockets, no devices."""
