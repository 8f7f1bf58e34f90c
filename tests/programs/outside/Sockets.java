// Blocking clients against a selector's non-blocking server; then timeouts, and a close during another thread's read.

import java.io.DataInputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.net.SocketException;
import java.net.SocketTimeoutException;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;

public class Sockets {
    static void serve(ServerSocketChannel listener, Selector selector) throws IOException {
        while (selector.isOpen()) {
            selector.select();
            for (SelectionKey key : selector.selectedKeys()) {
                if (key.isAcceptable()) {
                    SocketChannel accepted = listener.accept();
                    accepted.configureBlocking(false);
                    accepted.register(selector, SelectionKey.OP_READ, ByteBuffer.allocate(65536));
                } else {
                    echo(key);
                }
            }
            selector.selectedKeys().clear();
        }
    }

    static void echo(SelectionKey key) throws IOException {
        SocketChannel channel = (SocketChannel) key.channel();
        ByteBuffer held = (ByteBuffer) key.attachment();
        if (key.isReadable() && channel.read(held) < 0 && held.position() == 0) {
            channel.close();
            return;
        }
        held.flip();
        channel.write(held);
        held.compact();
        key.interestOps((held.position() > 0 ? SelectionKey.OP_WRITE : 0) | (held.hasRemaining() ? SelectionKey.OP_READ : 0));
    }

    static void converse(int port, int id) throws IOException {
        try (Socket socket = new Socket("127.0.0.1", port)) {
            socket.setSoTimeout(20000);
            DataInputStream in = new DataInputStream(socket.getInputStream());
            OutputStream out = socket.getOutputStream();
            for (int round = 0; round < 100; round++) {
                byte[] sent = new byte[1 + (id * 977 + round * 131) % 20000];
                for (int i = 0; i < sent.length; i++) {
                    sent[i] = (byte) (i * 31 + id + round);
                }
                out.write(sent);
                byte[] got = new byte[sent.length];
                in.readFully(got);
                if (!Arrays.equals(sent, got)) {
                    throw new IOException("round " + round + " of connection " + id + " came back changed");
                }
            }
        }
    }

    static void interrupt() throws Exception {
        try (ServerSocket listener = new ServerSocket(0, 5, InetAddress.getLoopbackAddress());
                Socket client = new Socket(InetAddress.getLoopbackAddress(), listener.getLocalPort());
                Socket server = listener.accept()) {
            for (int i = 0; i < 20; i++) {
                client.getOutputStream().write(i);
                check(server.getInputStream().read() == i, "a byte to the server");
                server.getOutputStream().write(i);
                check(client.getInputStream().read() == i, "a byte to the client");
            }
            client.setSoTimeout(100);
            try {
                client.getInputStream().read();
                check(false, "a timeout");
            } catch (SocketTimeoutException expected) {
                client.setSoTimeout(0);
            }
            // Before the read or during it, the outcome is the same.
            Thread closer = new Thread(() -> {
                try {
                    client.close();
                } catch (IOException e) {
                    throw new IllegalStateException(e);
                }
            });
            closer.start();
            try {
                client.getInputStream().read();
                check(false, "an exception of the interrupted read");
            } catch (SocketException expected) {
                check(server.getInputStream().read() == -1, "the end of the stream");
            }
            closer.join();
        }
    }

    static void check(boolean holds, String what) {
        if (!holds) {
            throw new IllegalStateException("missing: " + what);
        }
    }

    public static void main(String[] args) throws Exception {
        ServerSocketChannel listener = ServerSocketChannel.open();
        listener.bind(new InetSocketAddress("127.0.0.1", 0));
        listener.configureBlocking(false);
        int port = ((InetSocketAddress) listener.getLocalAddress()).getPort();
        Selector selector = Selector.open();
        listener.register(selector, SelectionKey.OP_ACCEPT);
        Thread server = new Thread(() -> {
            try {
                serve(listener, selector);
            } catch (IOException e) {
                throw new IllegalStateException(e);
            }
        });
        server.setDaemon(true);
        server.start();
        ExecutorService pool = Executors.newFixedThreadPool(16);
        List<Future<?>> all = new ArrayList<>();
        for (int i = 0; i < 64; i++) {
            int id = i;
            all.add(pool.submit(() -> {
                converse(port, id);
                return null;
            }));
        }
        for (Future<?> one : all) {
            one.get();
        }
        pool.shutdown();
        interrupt();
        System.out.println("all well");
        System.exit(0);
    }
}
