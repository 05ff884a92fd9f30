#include "mesh.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <stdexcept>

namespace verbatim {

// A rank that is alive answers within one product of one layer, or within all layers of its stage.
// A stopped process does not.
constexpr int TIMEOUT_MS = 600'000;
#ifdef MSG_NOSIGNAL
constexpr int FLAGS = MSG_DONTWAIT | MSG_NOSIGNAL;
#else
constexpr int FLAGS = MSG_DONTWAIT;
#endif

Mesh::Mesh(int rank, std::vector<int> fds) : rank_(rank), fds_(std::move(fds)), waited_ns_(fds_.size()) {
    if (rank < 0 || rank >= ranks() || fds_[rank] != -1)
        throw std::invalid_argument("a rank has one socket to each other rank");
}

void Mesh::fail(const std::string& what) {
    failed_ = what;
    throw std::runtime_error(what);
}

void Mesh::gather(const void* piece, const std::vector<size_t>& bytes, void* const* out,
                  bool root) {
    std::vector<Transfer> parts;
    for (int r = 0; r < ranks(); r++) {
        if (r == rank_) continue;
        if (!root || r == 0)
            parts.push_back({fds_[r], r, (char*)piece, bytes[rank_], POLLOUT});
        if (!root || rank_ == 0) parts.push_back({fds_[r], r, (char*)out[r], bytes[r], POLLIN});
    }
    transfer(parts);
}

std::vector<double> Mesh::waits() const {
    std::vector<double> out;
    for (const auto& ns : waited_ns_) out.push_back((double)ns / 1e9);
    return out;
}

void Mesh::broadcast(const void* data, size_t bytes) {
    std::vector<Transfer> parts;
    for (int r = 0; r < ranks(); r++)
        if (r != rank_) parts.push_back({fds_[r], r, (char*)data, bytes, POLLOUT});
    transfer(parts);
}

void Mesh::transfer(std::vector<Transfer>& parts) {
    if (!failed_.empty()) throw std::runtime_error(failed_);
    std::vector<pollfd> waiting;
    while (true) {
        bool moved = false;
        waiting.clear();
        for (Transfer& t : parts) {
            if (!t.left) continue;
            const bool sends = t.event == POLLOUT;
            const ssize_t n = sends ? send(t.fd, t.at, t.left, FLAGS) : recv(t.fd, t.at, t.left, FLAGS);
            if ((n == 0 && !sends) ||
                (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
                fail("rank " + std::to_string(t.rank) + " has ended");
            if (n > 0) t.at += n, t.left -= n, moved = true;
            if (t.left) waiting.push_back({t.fd, t.event, 0});
        }
        if (waiting.empty()) return;
        if (moved) continue;
        const auto began = std::chrono::steady_clock::now();
        const int ready = poll(waiting.data(), waiting.size(), TIMEOUT_MS);
        const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - began;
        for (const Transfer& t : parts)
            if (t.left && t.event == POLLIN) waited_ns_[t.rank] += waited.count();
        if (ready == 0) fail("a rank has not answered for ten minutes");
        if (ready < 0 && errno != EINTR) fail("the sockets between the ranks failed");
    }
}

}  // namespace verbatim
