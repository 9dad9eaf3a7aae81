"""What follows the last map of a chain: forward (`ending`), back (`gradients`), a norm (`norm`)."""
