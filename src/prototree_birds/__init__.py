"""Generated birds: a fine-grained data set in which it is known in what parts the species differ."""
