"""Anthropic's Messages: /v1/messages and /v1/messages/count_tokens."""
