"""Pages for users, and what makes a site of them."""
