#include "mesh.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <stdexcept>

namespace verbatim {

// A rank that is alive answers within one product of one layer. A stopped process does not.
constexpr int TIMEOUT_MS = 60'000;
#ifdef MSG_NOSIGNAL
constexpr int FLAGS = MSG_DONTWAIT | MSG_NOSIGNAL;
#else
constexpr int FLAGS = MSG_DONTWAIT;
#endif

Mesh::Mesh(int rank, std::vector<int> fds) : rank_(rank), fds_(std::move(fds)) {
    if (rank < 0 || rank >= ranks() || fds_[rank] != -1)
        throw std::invalid_argument("a rank has one socket to each other rank");
}

void Mesh::fail(const std::string& what) {
    failed_ = what;
    throw std::runtime_error(what);
}

void Mesh::gather(const void* piece, const std::vector<size_t>& bytes, void* const* out,
                  bool root) {
    if (!failed_.empty()) throw std::runtime_error(failed_);
    const int n = ranks();
    std::vector<size_t> sent(n, 0), received(n, 0);
    auto to_send = [&](int r) {
        return r == rank_ || (root && r != 0) ? 0 : bytes[rank_] - sent[r];
    };
    auto to_receive = [&](int r) {
        return r == rank_ || (root && rank_ != 0) ? 0 : bytes[r] - received[r];
    };
    std::vector<pollfd> waiting;
    while (true) {
        bool moved = false;
        waiting.clear();
        for (int r = 0; r < n; r++) {
            short events = 0;
            if (const size_t left = to_send(r)) {
                const ssize_t k = send(fds_[r], (const char*)piece + sent[r], left, FLAGS);
                if (k < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
                    fail("rank " + std::to_string(r) + " has ended");
                if (k > 0) sent[r] += k, moved = true;
                if (to_send(r)) events |= POLLOUT;
            }
            if (const size_t left = to_receive(r)) {
                const ssize_t k = recv(fds_[r], (char*)out[r] + received[r], left, FLAGS);
                if (k == 0 || (k < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
                    fail("rank " + std::to_string(r) + " has ended");
                if (k > 0) received[r] += k, moved = true;
                if (to_receive(r)) events |= POLLIN;
            }
            if (events) waiting.push_back({fds_[r], events, 0});
        }
        if (waiting.empty()) return;
        if (moved) continue;
        const int ready = poll(waiting.data(), waiting.size(), TIMEOUT_MS);
        if (ready == 0) fail("a rank has not answered for a minute");
        if (ready < 0 && errno != EINTR) fail("the sockets between the ranks failed");
    }
}

}  // namespace verbatim
