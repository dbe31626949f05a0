//! What only a GPU does: recorded steps, drawn tokens, a budget of its own.
