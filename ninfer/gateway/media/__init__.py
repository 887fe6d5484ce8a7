"""Pictures and videos of requests: where they come from, and what is known before decoding."""
