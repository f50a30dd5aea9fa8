"""`specsot bench quick` and `full`, and what the lab's measurements share with them."""
