"""What people read: tables and, later, pictures and traces."""
