"""Why Dynamo compiled again, what it cost and what to do about it."""
