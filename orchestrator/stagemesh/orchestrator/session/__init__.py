"""Sessions: conversations of numbered turns. The answer to each turn is a request."""
