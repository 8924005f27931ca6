"""Sessions: conversations of numbered turns, which outlive broken connections and orchestrators."""
