"""One worker task: order, budgets, commit and publication of requests."""
