"""The OpenAPI document: what every route takes and answers, from the constants that parsers use."""
