"""What a request contains and how much of its output has been received."""
