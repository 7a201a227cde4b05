"""What a load would do on ranks and clusters that are not there."""
